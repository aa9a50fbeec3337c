/* The one call of BMv2's simple_switch that a lab makes. */
service SimpleSwitch {
  i32 set_all_egress_queue_depths(1:i32 depth_pkts);
}
