"""What runs on the GPU: functions under ``triton.jit`` and nothing else. The host code beside this folder launches
them."""
