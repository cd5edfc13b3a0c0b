//! The changes of the launcher, of deadlines, and of processes that join a running job, that a test must notice.

use super::Mutant;

const LAUNCHED: &[&str] = &["test", "-p", "weftgrad-launch"];
const JOINED: &[&str] = &["test", "-p", "weftgrad-engine-process", "--lib"];
const CALLED: &[&str] = &["test", "-p", "weftgrad-comm", "--test", "all", "faults"];
const LAST: &[&str] = &["test", "-p", "weftgrad-train", "--test", "all", "--", "elastic_saves"];

#[rustfmt::skip]
pub(super) const OF_JOBS: &[Mutant] = &[
    Mutant { file: "launch/src/supervisor.rs", from: "                            self.restarts += 1;\n", to: "", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "left += usize::from(self.join(ranks, rank, meeting));", to: "self.join(ranks, rank, meeting);", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "if left >= fewest && why", to: "if left > fewest && why", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: " || supervisor.has_begun {", to: " {", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "why.is_none() && self.has_met()", to: "why.is_none()", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "if !is_over && self.has_ended_well(ranks)", to: "if false", test: LAUNCHED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "at.announce_member()?;", to: "", test: LAUNCHED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "filter(|_| is_new)", to: "filter(|_| true)", test: JOINED },
    Mutant { file: "launch/src/supervisor.rs", from: ".chain(look)", to: "", test: LAUNCHED },
    Mutant { file: "launch/src/environment.rs", from: "        folder.make()?;\n", to: "", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "is_some_and(|most| running < most)", to: "is_some_and(|most| running > most)", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "if self.signals == 0 {\n                        deadline", to: "if self.signals > 0 {\n                        deadline", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "rank.stopped = None;", to: "continue;", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "self.job.node_rank == 0 && ", to: "", test: LAUNCHED },
    Mutant { file: "launch/src/init.rs", from: ".process_group(0)", to: "", test: LAUNCHED },
    Mutant { file: "launch/src/init.rs", from: "Err(_) if kill(child, None).is_err()", to: "Err(_)", test: LAUNCHED },
    Mutant { file: "launch/src/environment.rs", from: "all.extend(is_newcomer.then(", to: "all.extend(false.then(", test: LAUNCHED },
    Mutant { file: "launch/src/environment.rs", from: "    JOIN_ADDRESS,\n    NEWCOMER,\n", to: "    JOIN_ADDRESS,\n    JOIN_ADDRESS,\n", test: LAUNCHED },
    Mutant { file: "launch/src/process.rs", from: "self.signal(Signal::SIGKILL);\n        let status", to: "let status", test: LAUNCHED },
    Mutant { file: "engine-process/src/progress/end.rs", from: "flight.waited() < flight.timeout", to: "flight.waited() < flight.world.deadlines.call", test: JOINED },
    Mutant { file: "engine-process/src/progress/mod.rs", from: "if !is_used {", to: "if !is_used || is_used {", test: JOINED },
    Mutant { file: "engine-process/src/tcp/outbox.rs", from: "        self.lends = false;\n", to: "", test: JOINED },
    Mutant { file: "engine-process/src/tcp/link/receives.rs", from: "let announced = long.map", to: "let announced = long.take(0).map", test: JOINED },
    Mutant { file: "engine-process/src/tcp/link/receives.rs", from: "let mut budget = COPIED;", to: "let mut budget = usize::MAX;", test: JOINED },
    Mutant { file: "engine-process/src/tcp/link.rs", from: "self.asked.retain(|copy| copy.receive.request != request);", to: "", test: JOINED },
    Mutant { file: "engine-process/src/tcp/transport.rs", from: "self.beat();", to: "", test: JOINED },
    Mutant { file: "engine-process/src/tcp/lent.rs", from: ".filter(|_| number == self.heard)", to: "", test: JOINED },
    Mutant { file: "engine-process/src/progress/recover.rs", from: "silent.iter().for_each(|&rank| self.gone[rank] = true);", to: "", test: JOINED },
    Mutant { file: "engine-process/src/progress/recover.rs", from: "_ if self.recovery.is_left_out(me) => {", to: "_ if false => {", test: JOINED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "                calls = false;\n", to: "", test: JOINED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "self.listens = comm.rank() == all", to: "self.listens = 1 == all", test: JOINED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "            0 => caller,\n            own if own == caller => 0,\n", to: "", test: JOINED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "let has_entered = all.iter().all(", to: "let has_entered = all.iter().any(", test: JOINED },
    Mutant { file: "engine-process/src/rendezvous.rs", from: "self.entered.take().filter(|_| has_entered)", to: "self.entered.take().filter(|_| false)", test: JOINED },
    Mutant { file: "engine-process/src/tcp/rendezvous.rs", from: "if !self.is_open {\n", to: "if true {\n", test: JOINED },
    Mutant { file: "engine-process/src/tcp/rendezvous.rs", from: "come.retain(|(hello, stream)| hello.rank.is_some() || !is_closed(stream));", to: "", test: JOINED },
    Mutant { file: "train/src/trainer/saving.rs", from: " && self.engine.step.ranks().everyone.size() > 1 {", to: " {", test: LAST },
    Mutant { file: "engine-process/src/processes.rs", from: "deadlines.into(), self.kinds.clone(), places", to: "deadlines.into(), Arc::default(), places", test: JOINED },
    Mutant { file: "engine-process/src/processes.rs", from: "        self.joined_at(before", to: "        self.kinds = before.kinds.clone();\n        self.joined_at(before", test: JOINED },
    Mutant { file: "engine-process/src/progress/mod.rs", from: "        self.flights.push(flight);\n        if", to: "        if world.failure().is_none() {\n            self.flights.push(flight);\n        }\n        if", test: JOINED },
    Mutant { file: "engine-process/src/tcp/door.rs", from: "|at| folder.create(at)", to: "|_| Ok(())", test: JOINED },
    Mutant { file: "engine-process/src/tcp/mod.rs", from: "bound.filter(|ip| !ip.is_unspecified())", to: "bound.filter(|ip| ip.is_unspecified())", test: JOINED },
    Mutant { file: "launch/src/init.rs", from: "SIGQUIT, SIGTSTP, SIGCONT, ", to: "", test: LAUNCHED },
    Mutant { file: "launch/src/init.rs", from: "SIGUSR1, SIGCHLD])", to: "SIGUSR1])", test: LAUNCHED },
    Mutant { file: "launch/src/supervisor.rs", from: "SIGTERM, SIGCHLD]", to: "SIGTERM]", test: LAUNCHED },
    Mutant { file: "engine-process/src/progress/mod.rs", from: "flight.check_gone(&self.gone).and_then(|()| flight.check_deadline())", to: "flight.check_deadline()", test: JOINED },
    Mutant { file: "comm/src/deadlines.rs", from: "if is_first { of.first } else { of.call }", to: "of.call", test: CALLED },
    Mutant { file: "comm/src/deadlines.rs", from: "own.unwrap_or(if", to: "Option::<Duration>::None.or(own.filter(|_| false)).unwrap_or(if", test: CALLED },
];
