"""The stub endpoint: the TCP server that shadow nodes connect to, played by the controller. Pure."""
