"""The core's rules applied to arrays that hold the windows of many ranks at once, for simulations of thousands of ranks."""
