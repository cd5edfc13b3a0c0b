//! Schedules as CSV: one row per rank, one column per time step, empty cells for idle steps, no header.
//!
//! `torch.distributed.pipelining` reads two such formats, and an argument selects one. In the format of passes alone
//! (`compute_only`) empty cells are idle steps. The format with communication has no empty cells. Sends and gradient
//! reductions are asynchronous there, and each has a cell that waits for it.
//!
//! In this crate a send is over when it is received, and a reduction when the step ends. Cells that wait are checked
//! and dropped by reads, and made by [`Schedule::to_torch_csv`].

use std::{collections::HashSet, fmt::Write as _};

use numcore::{Error, Result};

use super::action::{Action, Direction};
use super::costs::Costs;
use super::placement::StagePlacement;
use super::replay::{SendMode, replay};
use super::schedule::Schedule;
use super::text;

const WHAT: &str = "pipeline CSV";

impl Schedule {
    /// Reads a schedule, of torch too. Only the order of actions within a row counts: empty cells and torch's
    /// `WAIT_SEND_F`, `WAIT_SEND_B` and `WAIT_REDUCE_GRAD` are skipped. Rows define the ranks of stages, and the
    /// largest micro-batch defines their number.
    ///
    /// # Errors
    /// Fails for a cell that is no action, or that waits for an action missing before it in its row. The error names
    /// row and column, from 1. A stage in two rows, or in no row, is an error too.
    pub fn from_csv(text: &str) -> Result<Self> {
        let rows =
            text.trim_end().lines().enumerate().map(|(row, line)| parse_row(row, line)).collect::<Result<Vec<_>>>()?;
        let placement = infer_placement(&rows)?;
        let rows: Vec<Vec<Action>> =
            rows.into_iter().map(|row| row.into_iter().map(|cell| cell.action).collect()).collect();
        let micros = rows.iter().flatten().flat_map(Action::micros).max().map_or(0, |last| last.saturating_add(1));
        Schedule::new(placement, micros, rows)
    }

    /// Writes the schedule as torch reads it. A schedule of passes alone is written like [`to_csv`](Schedule::to_csv).
    /// A lowered one, or one with units, has no idle cells, but a cell that waits for each send and each gradient
    /// reduction.
    ///
    /// A send is waited for before the rank's next send of the same stage in the same direction. A reduction is waited
    /// for before the next one begins (torch has one pending at most). The rest is waited for at the end of the row.
    pub fn to_torch_csv(&self) -> String {
        let passes_alone = self.actions().all(|(_, _, action)| action.is_compute());
        if passes_alone { self.to_csv() } else { self.rows().iter().map(|row| torch_row(row) + "\n").collect() }
    }

    /// Writes the schedule. Columns are time steps, with one step for every action and for every message with both its
    /// ends. A schedule that cannot end is written without idle cells.
    pub fn to_csv(&self) -> String {
        let comm = u64::from(self.is_lowered());
        let steps = replay(self, &Costs::steps().with_comm(comm), SendMode::Synchronous).ok();
        let mut text = String::new();
        for (rank, row) in self.rows().iter().enumerate() {
            let mut column = 0;
            for (position, action) in row.iter().enumerate() {
                let step = steps.as_ref().map_or(position, |spans| spans[rank][position].start as usize);
                let _ = write!(text, "{}{action}", ",".repeat(step - column));
                column = step;
            }
            text.push('\n');
        }
        text
    }
}

struct CsvCell {
    row: usize,
    column: usize,
    action: Action,
}

fn parse_row(row: usize, line: &str) -> Result<Vec<CsvCell>> {
    let (mut cells, mut pending) = (Vec::new(), HashSet::new());
    for (column, cell) in line.split(',').enumerate().filter(|(_, cell)| !cell.trim().is_empty()) {
        if let Some(action) = text::waited_for(cell) {
            if !pending.remove(&action) {
                return Err(at(row, column, format!("{}: no {action} before it", cell.trim())));
            }
            continue;
        }
        let action = cell.parse().map_err(|error| at(row, column, format!("{error}")))?;
        pending.insert(action);
        cells.push(CsvCell { row, column, action });
    }
    Ok(cells)
}

/// A row's actions, with a wait for each asynchronous one.
fn torch_row(row: &[Action]) -> String {
    let (mut cells, mut pending) = (Vec::new(), Vec::<Action>::new());
    for action in row {
        if text::wait_for(action).is_some() {
            let first = pending.iter().position(|other| queue(other) == queue(action));
            cells.extend(first.map(|first| pending.remove(first)).iter().filter_map(text::wait_for));
            pending.push(*action);
        }
        cells.push(action.to_string());
    }
    cells.extend(pending.iter().filter_map(text::wait_for));
    cells.join(",")
}

/// The queue of an asynchronous action, in which one is pending at a time: sends of a stage in a direction, or
/// reductions.
fn queue(action: &Action) -> Option<(usize, Direction)> {
    match action {
        Action::Message(message) => Some((message.stage, message.direction)),
        _ => None,
    }
}

fn at(row: usize, column: usize, why: String) -> Error {
    Error::format(WHAT, format!("row {}, column {}: {why}", row + 1, column + 1))
}

fn infer_placement(rows: &[Vec<CsvCell>]) -> Result<StagePlacement> {
    let mut seen: Vec<(usize, &CsvCell)> =
        rows.iter().flatten().flat_map(|cell| cell.action.stages().map(move |stage| (stage, cell))).collect();
    seen.sort_by_key(|(stage, _)| *stage);
    let mut rank_of: Vec<usize> = Vec::new();
    for (stage, cell) in seen {
        match rank_of.get(stage) {
            None if stage == rank_of.len() => rank_of.push(cell.row),
            None => return Err(Error::format(WHAT, format!("no row has stage {}", rank_of.len()))),
            Some(&row) if row != cell.row => {
                let why = format!("{}: stage {stage} lives in row {} already", cell.action, row + 1);
                return Err(at(cell.row, cell.column, why));
            }
            Some(_) => {}
        }
    }
    StagePlacement::new(rank_of)
}
