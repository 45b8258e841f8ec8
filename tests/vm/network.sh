# Sourced in the guest: two Soft-RoCE devices that reach each other, rxe0 (10.77.0.1, on v0) and rxe1
# (10.77.0.2, on v1). Both addresses are this host's own, so it must accept packets from itself.
ip -batch - << 'COMMANDS' || exit 125
link add v0 mtu 4200 address 02:00:00:77:00:01 type veth peer name v1 mtu 4200 address 02:00:00:77:00:02
addr add 10.77.0.1/24 dev v0
addr add 10.77.0.2/24 dev v1
link set v0 up
link set v1 up
neigh replace 10.77.0.2 lladdr 02:00:00:77:00:02 dev v0 nud permanent
neigh replace 10.77.0.1 lladdr 02:00:00:77:00:01 dev v1 nud permanent
COMMANDS
for interface in all v0 v1; do
  echo 1 > /proc/sys/net/ipv4/conf/$interface/accept_local
  echo 0 > /proc/sys/net/ipv4/conf/$interface/rp_filter
done
rdma link add rxe0 type rxe netdev v0 && rdma link add rxe1 type rxe netdev v1 || exit 125
echo 16 > /proc/sys/vm/nr_hugepages
ulimit -l unlimited
