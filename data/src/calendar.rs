//! Dates of the Gregorian calendar.

/// Computes the year, the month and the day (from 1) of a number of days after 1 January 1970 (Hinnant's algorithm).
pub fn civil_date(days: u64) -> (u64, u32, u32) {
    // Years begin in March, and eras of 400 years have 146 097 days.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    (400 * era + year + u64::from(month <= 2), month as u32, day as u32)
}

#[cfg(test)]
mod tests {
    use super::civil_date;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let known = [
            (0, (1970, 1, 1)),
            (11_015, (2000, 2, 28)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_785, (2026, 11, 28)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ];
        known.iter().for_each(|(days, due)| assert_eq!(civil_date(*days), *due));
    }
}
