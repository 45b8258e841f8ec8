# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Fluid flows over shared resources, compiled: the hot loop of kvtransfer.sim.

Every resource has a capacity (units per second), every flow a size and, for each resource it uses, a
weight: units of the resource per unit of the flow. Rates are max-min fair: no flow's rate can grow
without another, not faster one, shrinking. They are kept by local water-filling: a change recomputes
the fair level of the resources it touches, and of others only as far as levels really change.
"""

from libcpp.algorithm cimport sort
from libcpp.queue cimport priority_queue
from libcpp.utility cimport pair
from libcpp.vector cimport vector

cdef double INFINITE = 1e300
cdef double TOLERANCE = 1e-9
cdef int MOST_USES = 8

ctypedef unsigned long long Version
ctypedef pair[Version, int] Due  # a flow, if that is its version still

cdef struct Use:
    int resource
    double weight

cdef struct Flow:
    double remaining
    double rate
    double last
    double most  # a rate of its own that it can't exceed
    Version version
    int num_uses
    Use uses[8]
    bint active



cdef class FluidNetwork:
    """Not thread-safe. Time only moves forward: every call's ``now`` is at least the one before."""

    cdef vector[double] capacity
    cdef vector[double] level
    cdef vector[vector[int]] users
    cdef vector[double] moved
    cdef vector[bint] queued
    cdef vector[Flow] flows
    cdef vector[int] free_flows
    cdef vector[int] work
    cdef vector[int] changed
    cdef vector[bint] is_changed
    cdef vector[pair[double, double]] scratch
    cdef priority_queue[pair[double, Due]] completions  # by the negative time
    cdef Version next_version
    cdef list tags
    cdef public long long steps

    def __init__(self):
        self.tags = []
        self.next_version = 1

    def add_resource(self, double capacity):
        """Returns its index. ``capacity`` must be positive."""
        if not capacity > 0:
            raise ValueError(f"a resource's capacity must be positive, got {capacity}")
        self.capacity.push_back(capacity)
        self.level.push_back(INFINITE)
        self.users.push_back(vector[int]())
        self.moved.push_back(0)
        self.queued.push_back(False)
        return self.capacity.size() - 1

    def start(self, double now, double size, uses, tag, double most=1e300):
        """Starts a flow of ``size`` over ``uses``, pairs of (resource, weight); returns its handle.

        ``tag`` comes back from ``finished``. ``most`` caps the flow's own rate.
        """
        cdef int index, i
        cdef Flow* flow
        if len(uses) > MOST_USES or len(uses) == 0:
            raise ValueError(f"a flow uses 1 to {MOST_USES} resources, got {len(uses)}")
        for resource, weight in uses:
            if not 0 <= resource < <int>self.capacity.size() or not weight > 0:
                raise ValueError(f"no resource {resource}, or no positive weight {weight}")
        if not size >= 0 or not most > 0:
            raise ValueError(f"a flow's size must not be negative, got {size}, nor its cap, {most}")
        if self.free_flows.empty():
            index = self.flows.size()
            self.flows.push_back(Flow())
            self.is_changed.push_back(False)
            self.tags.append(tag)
        else:
            index = self.free_flows.back()
            self.free_flows.pop_back()
            self.tags[index] = tag
        flow = &self.flows[index]
        flow.remaining = size
        flow.rate = 0
        flow.last = now
        flow.most = most
        flow.num_uses = len(uses)
        flow.active = True
        i = 0
        for resource, weight in uses:
            flow.uses[i].resource = resource
            flow.uses[i].weight = weight
            i += 1
        for i in range(flow.num_uses):
            self.users[flow.uses[i].resource].push_back(index)
            self.push_work(flow.uses[i].resource)
        self.touch(index)
        self.settle_all(now)
        return index

    def stop(self, double now, int index):
        """Ends a flow before it is through; returns what was left of it."""
        cdef Flow* flow = &self.flows[index]
        if not flow.active:
            raise ValueError(f"no flow {index}")
        self.settle(now, flow)
        left = flow.remaining
        self.remove(index)
        self.settle_all(now)
        return left

    def next_time(self):
        """When the next flow will be through; infinity when none is."""
        self.drop_stale()
        return float("inf") if self.completions.empty() else -self.completions.top().first

    def finished(self, double now):
        """Takes one flow that is through by ``now`` and returns its tag; None when there is none."""
        self.drop_stale()
        if self.completions.empty() or -self.completions.top().first > now:
            return None
        cdef int index = self.completions.top().second.second
        cdef Flow* flow = &self.flows[index]
        self.completions.pop()
        self.settle(now, flow)
        tag = self.tags[index]
        self.remove(index)
        self.settle_all(now)
        return tag

    def rate(self, int index):
        return self.flows[index].rate

    def moved_by(self, int resource):
        """Units that have passed it by the last call (as far as its flows were settled)."""
        return self.moved[resource]

    @property
    def num_flows(self):
        return self.flows.size() - self.free_flows.size()

    cdef void drop_stale(self) noexcept:
        cdef Due due
        while not self.completions.empty():
            due = self.completions.top().second
            if self.flows[due.second].version == due.first:
                return
            self.completions.pop()

    cdef void push_work(self, int resource) noexcept:
        if not self.queued[resource]:
            self.queued[resource] = True
            self.work.push_back(resource)

    cdef void touch(self, int index) noexcept:
        if not self.is_changed[index]:
            self.is_changed[index] = True
            self.changed.push_back(index)

    cdef void settle(self, double now, Flow* flow) noexcept:
        cdef int i
        cdef double done = flow.rate * (now - flow.last)
        if done > flow.remaining:
            done = flow.remaining
        flow.remaining -= done
        flow.last = now
        for i in range(flow.num_uses):
            self.moved[flow.uses[i].resource] += done * flow.uses[i].weight

    cdef void remove(self, int index):
        cdef Flow* flow = &self.flows[index]
        cdef int i, at, resource
        cdef vector[int]* users
        for i in range(flow.num_uses):
            resource = flow.uses[i].resource
            users = &self.users[resource]
            for at in range(<int>users.size()):
                if users[0][at] == index:
                    users[0][at] = users.back()
                    users.pop_back()
                    break
            self.push_work(resource)
        flow.version = 0
        flow.active = False
        self.tags[index] = None
        self.free_flows.push_back(index)

    cdef double limit_elsewhere(self, Flow* flow, int resource) noexcept:
        cdef double least = flow.most
        cdef int i
        for i in range(flow.num_uses):
            if flow.uses[i].resource != resource and self.level[flow.uses[i].resource] < least:
                least = self.level[flow.uses[i].resource]
        return least

    cdef double fair_level(self, int resource) noexcept:
        """The rate at which flows that nothing else limits fill the resource."""
        cdef vector[int]* users = &self.users[resource]
        cdef double left = self.capacity[resource], weight = 0, w
        cdef Flow* flow
        cdef int i, j
        self.scratch.clear()
        for i in range(<int>users.size()):
            flow = &self.flows[users[0][i]]
            w = 0
            for j in range(flow.num_uses):
                if flow.uses[j].resource == resource:
                    w += flow.uses[j].weight
            self.scratch.push_back(pair[double, double](self.limit_elsewhere(flow, resource), w))
            weight += w
        sort(self.scratch.begin(), self.scratch.end())
        for i in range(<int>self.scratch.size()):
            if self.scratch[i].first * weight >= left:
                return left / weight
            left -= self.scratch[i].first * self.scratch[i].second
            weight -= self.scratch[i].second
        return INFINITE

    cdef void settle_all(self, double now) noexcept:
        """Levels where something changed, then the rates and completions of the flows concerned."""
        cdef int resource, i, j
        cdef double level, old
        cdef Flow* flow
        cdef vector[int]* users
        cdef int budget = 64 + 16 * <int>self.capacity.size()
        cdef size_t at = 0
        while at < self.work.size() and budget > 0:
            resource = self.work[at]
            at += 1
            budget -= 1
            self.steps += 1
            self.queued[resource] = False
            level = self.fair_level(resource)
            old = self.level[resource]
            if abs(level - old) <= TOLERANCE * min(level, old):
                continue
            self.level[resource] = level
            users = &self.users[resource]
            for i in range(<int>users.size()):
                self.touch(users[0][i])
                flow = &self.flows[users[0][i]]
                for j in range(flow.num_uses):
                    if flow.uses[j].resource != resource:
                        self.push_work(flow.uses[j].resource)
        for i in range(<int>at, <int>self.work.size()):
            self.queued[self.work[i]] = False
        self.work.clear()
        for i in range(<int>self.changed.size()):
            self.is_changed[self.changed[i]] = False
            flow = &self.flows[self.changed[i]]
            if flow.active:
                self.update_rate(now, self.changed[i], flow)
        self.changed.clear()

    cdef void update_rate(self, double now, int index, Flow* flow) noexcept:
        cdef double rate = self.limit_elsewhere(flow, -1)
        if flow.version != 0 and abs(rate - flow.rate) <= TOLERANCE * rate:
            return
        self.settle(now, flow)
        flow.rate = rate
        flow.version = self.next_version
        self.next_version += 1
        self.completions.push(
            pair[double, Due](-(now + flow.remaining / rate), Due(flow.version, index))
        )
