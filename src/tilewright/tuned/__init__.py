"""Launch choices found by measurement: data, read by the ops that they belong to."""
