//! Estimates and searches as text.

use std::fmt::{self, Write as _};

use crate::{Estimate, FoundPlans, Machine};

impl FoundPlans {
    /// A table of the best plans, the fastest first. It has seconds of a step, sequences per second, the share of the
    /// peak of the model's own operations, and GB of the largest rank. Then the shares of the time in which a rank
    /// waits: for layers' exchanges, in bubbles, and for everything else that is exposed.
    pub fn table(&self, machine: &Machine) -> String {
        let mut text = String::from("   step s    seq/s  peak %      GB  layers %  bubble %  other %  plan\n");
        for found in &self.best {
            let (estimate, plan) = (&found.estimate, &found.plan);
            let share = |seconds: f64| 100.0 * seconds / estimate.step();
            let others = estimate.transfers + estimate.gathers + estimate.gradients;
            let _ = writeln!(
                text,
                "{:>9.4} {:>8.1} {:>7.1} {:>7.2} {:>9.1} {:>9.1} {:>8.1}  {plan}",
                estimate.step(),
                plan.global_batch() as f64 / estimate.step(),
                100.0 * estimate.utilization(machine),
                estimate.memory.total() as f64 / 1e9,
                share(estimate.layers),
                share(estimate.bubble),
                share(others),
            );
        }
        let _ = writeln!(
            text,
            "{} plans were estimated, {} of which need more than {:.1} GB",
            self.estimated,
            self.too_large,
            machine.memory / 1e9
        );
        self.refused.iter().for_each(|why| text.push_str(&format!("left out: {why}\n")));
        text
    }
}

/// A line for each part of the time and of the memory, with the reason for which time is exposed.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step();
        let times = [
            ("compute", self.compute, "kernels of forward and backward passes"),
            ("layers", self.layers, "exchanges in layers, for which the next kernel waits"),
            ("bubble", self.bubble, "waits for other pipeline ranks, at the ends of a step and for slower stages"),
            ("transfers", self.transfers, "messages between pipeline ranks that no pass hides"),
            ("gathers", self.gathers, "gathers of parameters that last longer than the passes beside them"),
            ("gradients", self.gradients, "sums that last longer than the backward pass beside them, and the last"),
            ("update", self.update, "the optimizer"),
        ];
        writeln!(f, "step {:>12.6} s", step)?;
        for (name, seconds, why) in times.iter().filter(|(_, seconds, _)| *seconds > 0.0) {
            writeln!(f, "  {name:<11} {seconds:>10.6} s  {:>5.1} %  {why}", 100.0 * seconds / step)?;
        }
        let memory = &self.memory;
        writeln!(f, "memory {:>10.3} GB", memory.total() as f64 / 1e9)?;
        let uses = [
            ("parameters", memory.parameters),
            ("gradients", memory.gradients),
            ("optimizer", memory.optimizer),
            ("activations", memory.activations),
            ("transient", memory.transient),
        ];
        uses.iter().try_for_each(|(name, bytes)| writeln!(f, "  {name:<11} {:>10.3} GB", *bytes as f64 / 1e9))
    }
}
