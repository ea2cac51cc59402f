"""What can be wrong with a checkpoint; raised by the other modules of this package.

ValueError
└── CheckpointError
    ├── CheckpointNotFoundError   no such directory, no weights in it, a shard is not there
    ├── CorruptCheckpointError    a file is cut off or malformed, an index names what is not there
    └── CheckpointMismatchError   whole, but not the tensors of this model
"""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded or written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A file or directory of the checkpoint does not exist."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is cut off, malformed or contradicts the index."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint's tensors are not those that the model config asks for."""
