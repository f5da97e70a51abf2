"""Cross-silo methods: clients keep state between rounds and end with personalised networks."""
