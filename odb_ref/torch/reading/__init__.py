"""From sample to batch: reading, measuring, setting bad samples aside, collating."""
