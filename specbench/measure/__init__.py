"""What is measured besides tokens: clocks, memory, NVML, the machine."""
