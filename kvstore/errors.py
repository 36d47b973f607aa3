"""The exception tree: its root, and the errors that the memory and the stores raise."""


class TidemillError(Exception):
    """Root of the errors that are expected. Bugs are assertions.

    TidemillError
        RequestError        the user's mistake: 4xx that names the field and the fix
        Unserved            every attempt failed, or no worker came: 503
        OutOfMemory         the arena cannot hold more now: the engine waits, evicts or preempts
        PagesMissing        neither worker nor store holds what the request was promised: produce it again
        WorkerGone          the peer died or is draining: place the request elsewhere
            GroupBroken     ... because ranks of its group lost each other
        StoreError          a page store cannot be opened: names the fix
        ModelError          a model folder cannot be served: names the fix
        SettingsError       a setting has no meaning, or needs what is not here: names the fix
        UsageError          options of the command that do not go together
        ConfigError         a configuration that cannot be: says all that is wrong, by place
        PortTaken           the endpoint cannot listen where it was told to
        LaunchError         Ray, the router or a worker does not start: names the reason
        Malformed           bytes from a peer that are no message
    """


class OutOfMemory(TidemillError):
    """The arena cannot hold more now: wait, evict or preempt."""


class StoreError(TidemillError):
    """A page store cannot be opened; the message names the fix."""
