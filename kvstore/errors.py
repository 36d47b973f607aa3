"""The exception tree: its root, and the errors that the memory and the stores raise."""


class TidemillError(Exception):
    """The root of expected errors. Bugs are assertions.

    TidemillError
        RequestError        The request is wrong: status 4xx, names the field and the fix.
        Unserved            Every attempt failed, or no worker was available: status 503.
        OutOfMemory         The arena is full now: the engine waits, evicts or preempts.
        PagesLost           Pages that a step reads while they are fetched did not arrive: it is void.
        PagesMissing        Neither a worker nor the store has the promised pages: recompute them.
        WorkerGone          The peer crashed or is draining: the request is placed elsewhere.
            GroupBroken     The ranks of a group lost each other.
        StoreError          A page store cannot be opened: names the fix.
        ModelError          A model folder cannot be served: names the fix.
        SettingsError       A setting is invalid, or needs something that is missing: names the fix.
        UsageError          Options of the command that contradict each other.
        ConfigError         An invalid configuration: names every problem and its position.
        PortTaken           The configured port is in use.
        LaunchError         Ray, the router or a worker does not start: names the reason.
        RayEnded            A process of our own Ray ended: start the server again.
        Malformed           Bytes from a peer that are not a valid message.
    """


class OutOfMemory(TidemillError):
    """The arena is full now: wait, evict or preempt."""


class StoreError(TidemillError):
    """A page store cannot be opened; the message names the fix."""
