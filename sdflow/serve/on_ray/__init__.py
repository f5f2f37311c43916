"""`sdflow serve --on ray`: the server as an application of Ray Serve. One front answers, replicas draw."""
