//! The times of a step's actions, and their picture as SVG.

use std::fmt::Write as _;

use super::action::{Action, Pass};
use super::simulate::Simulation;

/// The times of all actions, per rank, simulated or measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// One list per rank.
    pub ranks: Vec<Vec<TimelineEvent>>,
}

/// An action and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelineEvent {
    /// The action.
    pub action: Action,
    /// The start of the action, in ticks.
    pub start: u64,
    /// The end of the action, in ticks.
    pub end: u64,
}

impl From<&Simulation<'_>> for Timeline {
    fn from(simulation: &Simulation<'_>) -> Self {
        let rows = simulation.schedule().rows().iter().zip(simulation.spans());
        let ranks = rows.map(|(row, spans)| {
            let events = row.iter().zip(spans);
            events.map(|(&action, span)| TimelineEvent { action, start: span.start, end: span.end }).collect()
        });
        Timeline { ranks: ranks.collect() }
    }
}

const WIDTH: f64 = 1200.0;
const ROW: f64 = 28.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 8.0;

impl Timeline {
    /// The end of the last event.
    pub fn end(&self) -> u64 {
        self.ranks.iter().flatten().map(|event| event.end).max().unwrap_or(0)
    }

    /// Draws a row per rank, with time to the right and a box for each action that takes time. Boxes are coloured by
    /// pass (paler for a rank's further stages) and labelled with the micro-batch. A tooltip has the full name.
    pub fn to_svg(&self) -> String {
        let height = 2.0 * TOP + ROW * self.ranks.len() as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n",
            LEFT + WIDTH + TOP
        );
        let scale = WIDTH / self.end().max(1) as f64;
        for (rank, events) in self.ranks.iter().enumerate() {
            let y = TOP + ROW * rank as f64;
            let _ = writeln!(svg, "<text x=\"4\" y=\"{}\">rank {rank}</text>", y + ROW * 0.6);
            let mut stages: Vec<usize> = events.iter().flat_map(|event| event.action.stages()).collect();
            stages.sort_unstable();
            stages.dedup();
            for event in events.iter().filter(|event| event.end > event.start) {
                svg.push_str(&event.to_rect(y, scale, &stages));
            }
        }
        svg + "</svg>\n"
    }
}

impl TimelineEvent {
    fn to_rect(self, y: f64, scale: f64, stages: &[usize]) -> String {
        let (x, width) = (LEFT + self.start as f64 * scale, (self.end - self.start) as f64 * scale);
        let chunk = self.action.stages().next().and_then(|stage| stages.iter().position(|&other| other == stage));
        let opacity = 1.0 / (1.0 + 0.5 * chunk.unwrap_or(0) as f64);
        let label: Vec<String> = self.action.micros().map(|micro| micro.to_string()).collect();
        format!(
            "<g><title>{name} [{start}, {end}]</title><rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{h}\" fill=\"{fill}\" \
             fill-opacity=\"{opacity:.2}\" stroke=\"#444\" stroke-width=\"0.5\"/><text x=\"{tx:.2}\" y=\"{ty}\" \
             text-anchor=\"middle\">{label}</text></g>\n",
            name = self.action,
            start = self.start,
            end = self.end,
            h = ROW - 4.0,
            fill = colour(self.action),
            tx = x + width / 2.0,
            ty = y + ROW * 0.6,
            label = label.join("&amp;"),
        )
    }
}

fn colour(action: Action) -> &'static str {
    match action {
        Action::Compute(compute) => match compute.pass {
            Pass::F => "#6f9fd8",
            Pass::B => "#7fbf7b",
            Pass::I => "#8fd0c0",
            Pass::W => "#b8a4d8",
        },
        Action::Overlap(..) => "#e0b050",
        Action::Message(_) => "#c8c8c8",
        Action::Unit(_) => "#d88f8f",
    }
}
