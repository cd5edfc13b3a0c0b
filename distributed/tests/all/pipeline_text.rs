//! Schedules as CSV: everything written reads back; everything else is refused with its place.

use crate::{pipeline_common::shape, prelude::*};

#[test]
fn every_schedule_reads_back_and_is_written_as_torch_reads_it() {
    let mut read = 0;
    for &kind in ScheduleKind::ALL {
        for (v, m, p) in (1..4).flat_map(|v| (1..9).flat_map(move |m| (1..5).map(move |p| (v, m, p)))) {
            let Ok(schedule) = kind.generate(shape(p, v, m)) else { continue };
            let lowered = schedule.lower(Lowering { sharded: m % 2 == 0, ..Lowering::default() }).unwrap();
            assert_eq!(schedule.to_torch_csv(), schedule.to_csv(), "of passes alone there is one format");
            let torch = lowered.to_torch_csv();
            torch.lines().for_each(torch_accepts);
            for (text, schedule) in [(schedule.to_csv(), &schedule), (lowered.to_csv(), &lowered), (torch, &lowered)] {
                assert_eq!(Schedule::from_csv(&text).unwrap(), *schedule, "{kind} {v} {m} {p}");
                read += 1;
            }
        }
    }
    assert!(read > 600, "{read}");
}

#[test]
fn spaces_empty_cells_and_line_ends_do_not_matter() {
    let plain = Schedule::from_csv("0F0,0B0\n1F0,1B0\n").unwrap();
    assert_eq!(Schedule::from_csv(" 0F0 ,,, 0B0,\r\n,1F0,1B0,,\r\n\r\n").unwrap(), plain);
    assert_eq!(plain.to_csv(), "0F0,,,0B0\n,1F0,1B0\n");
}

/// What cannot be played has no steps; it is written as it stands.
#[test]
fn what_cannot_end_is_written_without_idle_cells() {
    let text = "0B0,0F0\n1F0,1B0\n";
    assert_eq!(Schedule::from_csv(text).unwrap().to_csv(), text);
}

/// 1F1B, p = 2, m = 2, lowered, in torch's format.
const TORCH: &str = "\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD
1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD
";

#[test]
fn schedules_of_torch_are_read() {
    let read = Schedule::from_csv(TORCH).unwrap();
    let without: String = TORCH
        .lines()
        .map(|line| {
            let cells: Vec<&str> = line.split(',').filter(|cell| !cell.contains("WAIT")).collect();
            cells.join(",") + "\n"
        })
        .collect();
    assert_eq!(read, Schedule::from_csv(&without).unwrap());
    read.check(Limits::default()).unwrap();
    // Of passes alone, with a reduction at the end of each row.
    let gpipe = "0F0,0F1,,,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n,1F0,1F1,1B0,1B1,,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n";
    assert!(Schedule::from_csv(gpipe).unwrap().actions().count() == 10);
    expect_refused("0F0,0WAIT_SEND_F0\n", "row 1, column 2: 0WAIT_SEND_F0: no 0SEND_F0 before it");
    expect_refused(
        "0SEND_F0,0WAIT_SEND_F0,0WAIT_SEND_F0\n1F0\n",
        "row 1, column 3: 0WAIT_SEND_F0: no 0SEND_F0 before it",
    );
    expect_refused("0RECV_F0,0WAIT_RECV_F0\n", "row 1, column 2: action `0WAIT_RECV_F0`: expected stage");
}

/// The rules of torch's reader, on a row of cells: no idle cell, every asynchronous action waited for once, after it; at most one
/// reduction pending.
fn torch_accepts(row: &str) {
    let (mut pending, mut reductions) = (Vec::new(), 0);
    for cell in row.split(',') {
        assert!(!cell.is_empty(), "an idle cell in {row}");
        if cell.contains("WAIT_") {
            let begun = cell.replace("WAIT_", "");
            let at = pending.iter().position(|other| *other == begun);
            pending.remove(at.unwrap_or_else(|| panic!("{cell} waits for nothing in {row}")));
            reductions -= i32::from(cell.ends_with("REDUCE_GRAD"));
        } else if cell.contains("SEND") || cell.contains("REDUCE_GRAD") {
            reductions += i32::from(cell.ends_with("REDUCE_GRAD"));
            assert!(reductions <= 1, "two reductions are pending in {row}");
            pending.push(cell.to_string());
        }
    }
    assert!(pending.is_empty(), "{pending:?} are never waited for in {row}");
}

fn expect_refused(text: &str, error: &str) {
    let got = Schedule::from_csv(text).unwrap_err().to_string();
    assert!(got.contains(error), "{text:?} gave {got:?}, not {error:?}");
}

#[test]
fn errors_name_row_and_column() {
    expect_refused(
        "0F0,0B0\n1F0,,1X0\n",
        "pipeline CSV: row 2, column 3: action `1X0`: expected stage, one of F B I W",
    );
    expect_refused("0F0\n1F0,0B0\n", "row 2, column 2: 0B0: stage 0 lives in row 1 already");
    expect_refused("0F0\n2F0\n", "no row has stage 1");
    expect_refused("0F99999999999\n", "100000000000 micro-batches, but only 1 actions");
    expect_refused("99999999999F0\n", "no row has stage 0");
    expect_refused("", "no stage at all");
    expect_refused("0F0\n\n1F0\n", "rank 1 of 3 has no stage");
}
