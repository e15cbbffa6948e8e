"""Every error a user can cause. The command line prints one as a single line and exits with status 2."""


class StepgraphError(Exception):
    """Base of all errors that say what happened, where, and what to change."""


class ConfigError(StepgraphError):
    """A setting that cannot work: a ladder, a slot, a backend, an option."""


class InputError(StepgraphError):
    """Inputs of one step that do not fit the buffers: a shape, a missing slot, too many rows."""


class CaptureError(StepgraphError):
    """A step that cannot be recorded, or a capture where none is allowed."""


class ReplayError(StepgraphError):
    """A replay that would read or return something stale."""
