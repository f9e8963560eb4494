"""Records of runs and what becomes of them: samples, sinks, live pages, comparisons, exports; warm starts, the check of a machine."""

from rlgraph.api import export as export
from rlgraph.api import record as record
from rlgraph.api import report as report
from rlgraph.api import watch as watch
from rlgraph.comparing import compare as compare
from rlgraph.diagnosis import doctor as doctor
from rlgraph.recording import sinks as sinks
from rlgraph.recording.samples import Samples as Samples
from rlgraph.runtime.driver.warm import warm as warm
