"""The library's logger, whose handlers cannot fail a caller."""

from __future__ import annotations

import logging
import threading
from typing import Any


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger that suppresses the errors of log handlers, which no caller could handle.

    Outside the main thread this includes `SystemExit`, which would end the engine's thread; in the
    main thread, it may come from a signal handler.
    """

    def log(self, level: int, msg: object, *args: object, **keywords: Any) -> None:
        """Log the message at this level, for the caller of `info`, `warning` and so on."""
        try:
            self.logger.log(level, msg, *args, stacklevel=2, **keywords)
        except Exception:
            pass
        except BaseException:
            if threading.current_thread() is threading.main_thread():
                raise


logger = Logger(logging.getLogger("asyncckpt"))
