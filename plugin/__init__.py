"""Keep long-sequence fine-tuning inside the memory of the device it runs on."""
