"""How ranks meet. `base` declares what a group needs of a transport; `shm` is shared memory on one host."""
