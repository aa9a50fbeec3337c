"""What `--json` prints, as models from which `checkmate schema` generates JSON Schemas."""
