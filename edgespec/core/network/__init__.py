"""Links as arithmetic: delays, losses and queues that the transports and the simulator share."""
