"""`sdflow serve --on ray`: the server as a Ray Serve application, with one front for requests and replicas that
generate."""
