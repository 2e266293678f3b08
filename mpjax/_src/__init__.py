"""The inside of mpjax. What is public stands in `mpjax`."""
