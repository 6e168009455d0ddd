"""Device memory, launches and host waits of both engines on the simulated accelerator."""
