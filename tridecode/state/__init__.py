"""State of requests on the device: K/V pages, the prefix tree, slots."""
