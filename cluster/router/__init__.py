"""The router process: admission, placement, fair queueing and the view of the fleet."""
