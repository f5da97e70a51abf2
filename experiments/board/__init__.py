"""`fedloom board`: a live web page on loopback that shows runs and ablations; it reads results and never writes."""
