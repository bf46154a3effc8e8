"""The parts of a comparison's page, one file each."""
