//! Pipeline parallelism: schedules as data, checked before they may run.
