"""What a task of `device_check.py` found: checks that passed or failed, what is missing."""

import time
import traceback

MOST_LINES = 25  # of a traceback, and of a task's failures
MOST_SHOWN = 2  # tracebacks of a task; the others are in its result


class Missing(Exception):
    """Something optional is not here; the message says why."""


class Report:
    """Collects results; what fails is printed with its traceback, and does not end the task."""

    def __init__(self, task):
        self.task = task
        self.passed, self.failed, self.missing = [], [], []
        self.figures, self.errors = {}, {}
        self._begin = time.perf_counter()

    def check(self, name, function, *args):
        """Call a function that raises where something is wrong; tell whether it passed."""
        try:
            function(*args)
        except Missing as reason:
            self.missing.append(f"{name}: {reason}")
        except Exception:
            self.fail(name)
        else:
            self.passed.append(name)
            return True
        return False

    def fail(self, name):
        """Note a failure; the exception under way is printed."""
        self.failed.append(name)
        lines = traceback.format_exc().strip().splitlines()[-MOST_LINES:]
        self.errors[name] = lines
        if len(self.failed) <= MOST_SHOWN:
            print(f"FAILED {self.task}: {name}", *lines, sep="\n", flush=True)

    def result(self):
        """Return everything as what JSON can hold."""
        return {
            "task": self.task,
            "passed": self.passed,
            "failed": self.failed,
            "missing": self.missing,
            "figures": self.figures,
            "errors": self.errors,
            "seconds": round(time.perf_counter() - self._begin, 1),
        }


def no_result(task, reason):
    """Return the result of a task that did not come to its end."""
    return Report(task).result() | {"failed": [reason]}


def line(result):
    """Return a result in a few words."""
    text = f"{result['task']}: {len(result['passed'])} passed, {len(result['failed'])} FAILED"
    text = text if result["failed"] else text.removesuffix(", 0 FAILED")
    lines = [f"{text} ({result['seconds']} s)"]
    lines += [f"  FAILED {name}" for name in result["failed"][:MOST_LINES]]
    lines += [f"  without {what}" for what in result["missing"]]
    return "\n".join(lines)
