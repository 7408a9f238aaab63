"""Ctrl-C and SIGTERM as a wish to stop, not as an exception in the middle of a step."""

import signal
import threading


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is noted; the next one aborts.

    Called, it returns the name of the signal, or None. Python can set handlers in the
    main thread only; entered in another one, signals do what they did before.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say):
        """`say` is called with a line to show when the first signal comes."""
        self._say = say
        self._received: signal.Signals | None = None
        self._before = {}

    def __call__(self) -> str | None:
        return self._received.name if self._received is not None else None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            # None: it was not set from Python, and cannot be again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
        self._say("Stopping after this step; once more to stop at once.")
