"""Runs of two processes on this machine, four simulated devices each: the same numbers as of one, and no end unsaid."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_checkpoint import (  # noqa: F401, the fixtures among them
    MESH,
    ROOT,
    corpus,
    flags,
    load,
    read_metrics,
    saved,
    start,
    steps_in,
    tiny,
    wait_until,
)

pytestmark = pytest.mark.slow
LOST = "train.py: error: another process of this run is lost; when all are started again, the same command resumes"
