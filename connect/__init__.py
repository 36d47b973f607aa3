"""Page stores for engines of others: the classes that they load into their own processes."""
