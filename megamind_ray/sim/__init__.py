"""A plan in virtual time: the same programs, limits and state machine as the actors', over a model of the hardware."""

from megamind_ray.sim.faults import ExtentFault, LoadFault, NodeLoss, WorkerLoss
from megamind_ray.sim.load import MAX_FLOWS, Simulation, simulate_plan

__all__ = ["MAX_FLOWS", "ExtentFault", "LoadFault", "NodeLoss", "Simulation", "WorkerLoss", "simulate_plan"]
