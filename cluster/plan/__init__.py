"""`tidemill plan`: how many workers a model needs for a load, by search over the simulator."""
