//! Schedules as CSV: one row per rank, one column per time step, empty cells for idle steps, no header.
//!
//! `torch.distributed.pipelining` reads two such formats, which it tells apart by an argument. Of computation alone (`compute_only`) empty
//! cells are idle steps. With communication there are none, and every send and every reduction of gradients, asynchronous there, has a cell
//! that waits for it. Here a send is over when it is received and a reduction when the step ends, so those cells are checked and dropped
//! when they are read, and made when they are written ([`Schedule::to_torch_csv`]).

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
    /// Reads a schedule, torch's too. Empty cells are skipped, and torch's `WAIT_SEND_F`, `WAIT_SEND_B` and `WAIT_REDUCE_GRAD`: the order of
    /// actions within a row is all that counts. Stages live where the rows say, and there are as many micro-batches as the largest one
    /// named says.
    ///
    /// # Errors
    /// Names row and column (from 1) of a cell that is no action, that waits for what its row has not begun, or whose stage another row has
    /// too; or the stage that no row has.
    pub fn from_csv(text: &str) -> Result<Self> {
        let rows =
            text.trim_end().lines().enumerate().map(|(row, line)| parse_row(row, line)).collect::<Result<Vec<_>>>()?;
        let placement = infer_placement(&rows)?;
        let rows: Vec<Vec<Action>> =
            rows.into_iter().map(|row| row.into_iter().map(|cell| cell.action).collect()).collect();
        let micros = rows.iter().flatten().flat_map(Action::micros).max().map_or(0, |last| last.saturating_add(1));
        Schedule::new(placement, micros, rows)
    }

    /// Writes the schedule as torch reads it: one of passes alone as [`to_csv`](Schedule::to_csv) does; one that is lowered, or has units,
    /// without idle cells, and with a cell that waits for each send and each reduction of gradients. A send is waited for before the rank's
    /// next send to the same stage in the same direction, a reduction before the next one begins (torch has one pending at most), and what
    /// is left at the end of the row.
    pub fn to_torch_csv(&self) -> String {
        let passes_alone = self.actions().all(|(_, _, action)| action.is_compute());
        if passes_alone { self.to_csv() } else { self.rows().iter().map(|row| torch_row(row) + "\n").collect() }
    }

    /// Writes the schedule. Columns are the steps it would take if every action, and every message with both its ends, took
    /// one step; a schedule that cannot end is written without idle cells.
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

/// A row's actions, each asynchronous one with its wait.
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

/// Of what is asynchronous, what is pending one at a time: sends of a stage in a direction, and reductions.
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
