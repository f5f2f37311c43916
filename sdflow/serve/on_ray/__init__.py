"""`sdflow serve --on ray`: the server as a Ray Serve application, with a front and replicas."""
