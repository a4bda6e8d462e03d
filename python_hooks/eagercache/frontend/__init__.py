"""What programs call: switch on, record, ask."""
