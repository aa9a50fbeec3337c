"""The stub endpoint: the TCP server that shadow nodes connect to, emulated by the controller. Pure."""
