"""The ground floor: what all packages use. It imports nothing of mpjax but itself."""
