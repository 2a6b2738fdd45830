"""For all tests: Ctrl-C interrupts, also where the tests are a shell's background job, which ignores it."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
