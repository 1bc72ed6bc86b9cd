"""`tridecode bench`: times of the engine next to measured hardware limits, and times of servers."""
