import logging

# bitsandbytes, which PEFT loads where it is installed, advises an inference kernel that a trained base cannot use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
