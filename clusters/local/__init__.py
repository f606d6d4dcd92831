"""Start and stop what one machine needs: a Ray head with its dashboard and an MLflow server, both on loopback only."""
