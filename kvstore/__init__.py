"""Pages, window pages and states: their layout, the memory of a worker, and shared page stores."""
