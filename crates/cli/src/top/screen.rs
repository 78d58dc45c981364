//! The state on a screen of any size.

use fanin_controller::page::view::{Job, JobState, Rank, Service, Severity, State};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, Wrap};

/// What is shown of all that there is.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    job: isize,
    first_rank: usize,
}

impl Chosen {
    pub fn next_job(&mut self, step: isize) {
        (self.job, self.first_rank) = (self.job + step, 0);
    }

    pub fn scroll(&mut self, ranks: isize) {
        self.first_rank = self.first_rank.saturating_add_signed(ranks);
    }
}

const HEADER: Style = Style::new().add_modifier(Modifier::BOLD);

pub(super) fn draw(frame: &mut Frame<'_>, state: &State, chosen: &mut Chosen) {
    let words = words(state);
    let width = usize::from(frame.area().width).max(1);
    let lines: usize = words.iter().map(|line| line.width().div_ceil(width)).sum();
    let services = state.services.len().clamp(1, 8) as u16 + 2;
    let events = 6.min(frame.area().height / 5);
    let [title, said, of_services, of_job, of_events] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(lines.clamp(1, 8) as u16),
        Constraint::Length(services),
        Constraint::Min(8),
        Constraint::Length(events),
    ])
    .areas(frame.area());
    let (running, jobs) = (running(state), state.jobs.len() + state.hidden_jobs);
    let services = state.services.len();
    let text = format!(
        " fanin {}   services: {services}   jobs: {jobs}, running: {running}   ←→ job  ↑↓ ranks  q ends",
        state.version
    );
    frame.render_widget(Line::from(text).reversed(), title);
    frame.render_widget(Paragraph::new(words).wrap(Wrap { trim: true }), said);
    frame.render_widget(table_of_services(state), of_services);
    match state.jobs.len() {
        0 => frame.render_widget(
            Paragraph::new("No job is here. fanin run --nproc-per-node 4 train.py starts one."),
            of_job,
        ),
        count => {
            let index = chosen.job.rem_euclid(count as isize) as usize;
            draw_job(frame, of_job, state, (index, count), chosen);
        }
    }
    frame.render_widget(table_of_events(state, events), of_events);
}

fn running(state: &State) -> usize {
    state.jobs.iter().filter(|job| job.state == JobState::Running).count()
}

fn words(state: &State) -> Vec<Line<'_>> {
    let mut words: Vec<_> = state.words.iter().chain(state.jobs.iter().flat_map(|job| &job.words)).collect();
    words.sort_by_key(|word| std::cmp::Reverse(word.severity));
    words.dedup();
    let line = |word: &&_| {
        let fanin_controller::page::view::Word { severity, text, cure, .. } = *word;
        let (mark, style) = match severity {
            Severity::Warning => ("! ", Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD)),
            Severity::Note => ("  ", Style::new()),
        };
        let mut spans = vec![Span::styled(format!("{mark}{text}"), style)];
        spans.extend(cure.as_ref().map(|cure| Span::raw(format!(": {cure}")).dim()));
        Line::from(spans)
    };
    let mut lines: Vec<_> = words.iter().map(line).collect();
    if lines.is_empty() && running(state) > 0 {
        lines.push(Line::from("  All is well."));
    }
    lines
}

fn table_of_services(state: &State) -> Table<'_> {
    let row = |service: &Service| {
        let part = |rate: Option<f64>| {
            let of_link =
                rate.zip(service.rate).map(|(now, link)| format!(" {:3.0} %", 100.0 * now / link as f64));
            format!("{}{}", bits(rate), of_link.unwrap_or_default())
        };
        let pool = service.pool.map(|pool| format!("{} of {}", pool.free, pool.units));
        let state = service.silent.as_ref().map_or_else(|| "answers".into(), |why| format!("silent: {why}"));
        let style = if service.silent.is_some() { Style::new().fg(Color::Yellow) } else { Style::new() };
        Row::new([
            service.address.clone(),
            service.upstream.clone().unwrap_or_default(),
            part(service.received),
            part(service.sent),
            pool.unwrap_or_default(),
            state,
        ])
        .style(style)
    };
    let widths = [
        Constraint::Min(18),
        Constraint::Max(18),
        Constraint::Length(18),
        Constraint::Length(18),
        Constraint::Length(18),
        Constraint::Min(8),
    ];
    let header = Row::new(["service", "sends to", "receives", "sends", "memory free", "state"]).style(HEADER);
    Table::new(state.services.iter().map(row), widths)
        .header(header)
        .block(Block::new().borders(Borders::TOP))
}

fn draw_job(
    frame: &mut Frame<'_>,
    area: Rect,
    state: &State,
    (index, count): (usize, usize),
    chosen: &mut Chosen,
) {
    let job = &state.jobs[index];
    let title = format!(" job {} of {count}: {} ", index + 1, job.name);
    let block = Block::new().borders(Borders::TOP).title(title);
    let inside = block.inner(area);
    frame.render_widget(block, area);
    let shares = job.shares.len().min(8) as u16 + u16::from(!job.shares.is_empty());
    let [facts, rate, of_shares, of_ranks] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(2),
        Constraint::Length(shares),
        Constraint::Min(3),
    ])
    .areas(inside);
    frame.render_widget(Paragraph::new(lines_of_job(job)), facts);
    if let Some(series) = state.history.jobs.get(&job.name) {
        let width = usize::from(rate.width);
        let newest = series.summed.len().saturating_sub(width);
        let data: Vec<u64> =
            series.summed[newest..].iter().map(|rate| rate.unwrap_or_default() as u64).collect();
        frame.render_widget(Sparkline::default().data(data).style(Style::new().fg(Color::Cyan)), rate);
    }
    frame.render_widget(table_of_shares(job), of_shares);
    let most = usize::from(of_ranks.height.saturating_sub(1));
    chosen.first_rank = chosen.first_rank.min(job.ranks.len().saturating_sub(most));
    frame.render_widget(table_of_ranks(job, chosen.first_rank), of_ranks);
}

fn lines_of_job(job: &Job) -> Vec<Line<'_>> {
    let state = match job.state {
        JobState::Gathering => format!("waits for {} of {} ranks", job.missing.len(), job.world_size),
        JobState::Aborted => format!("ended: {}", job.reason.as_deref().unwrap_or_default()),
        JobState::Running => {
            let steps = job.steps.map_or_else(String::new, |steps| format!(", {steps:.2} steps/s"));
            let sums =
                job.in_sums.map_or_else(String::new, |part| format!(", {:.0} % in sums", 100.0 * part));
            let left = if job.left.is_empty() { String::new() } else { format!(", {} left", job.left.len()) };
            format!("runs with {} ranks{left}{steps}{sums}", job.world_size)
        }
    };
    let plan = job.plan.as_ref().map_or_else(String::new, |plan| {
        let ms =
            |time: Option<f64>| time.map_or_else(|| "-".into(), |time| format!("{:.3} ms/MB", time * 1e9));
        let bound = plan.bound.as_ref().map_or_else(String::new, |bound| format!(", bound by {bound}"));
        format!("predicted {}{bound}; measured {}", ms(plan.predicted), ms(plan.measured))
    });
    vec![
        Line::from(format!(
            "{state}; {} {}, {}, window {}",
            job.protocol, job.wire_dtype, job.security, job.window
        )),
        Line::from(plan),
    ]
}

fn table_of_shares(job: &Job) -> Table<'_> {
    let rows = job.shares.iter().map(|share| {
        let measured = share.measured.map_or_else(|| "-".into(), |part| format!("{:5.1} %", 100.0 * part));
        let host = share.host.map_or_else(|| "nobody of the job".into(), |rank| format!("rank {rank}"));
        Row::new([share.service.clone(), format!("{:5.1} %", 100.0 * share.share), measured, host])
    });
    let widths = [Constraint::Min(20), Constraint::Length(9), Constraint::Length(9), Constraint::Min(12)];
    Table::new(rows, widths).header(Row::new(["sums at", "plan", "now", "hosted by"]).style(HEADER))
}

fn table_of_ranks(job: &Job, first: usize) -> Table<'_> {
    let row = |rank: &Rank| {
        let ms = |time: f64| format!("{:.1}", time * 1e3);
        let late = rank.late.map_or_else(Default::default, |late| {
            [ms(late.low), ms(late.median), ms(late.high), format!("{:.0}", 100.0 * late.last)]
        });
        let called = match rank.ranks[..] {
            [first, .., last] => format!("{first}-{last}"),
            _ => rank.rank.to_string(),
        };
        let trip = rank.round_trip.map_or_else(|| "-".into(), ms);
        let mut cells = vec![called, rank.name.clone(), rank.address.clone(), trip];
        cells.push(format!("{:.0}", 100.0 * rank.waited_for));
        cells.extend(late);
        let is_late = rank.late.is_some_and(|late| late.of >= 10 && late.last >= 0.5);
        let style = if is_late { Style::new().fg(Color::Yellow) } else { Style::new() };
        let style = if rank.left { Style::new().dim() } else { style };
        Row::new(cells.into_iter().map(Cell::from)).style(style)
    };
    let header =
        ["rank", "machine", "address", "trip ms", "waited %", "late 1/4", "median", "3/4 ms", "last %"];
    let widths = [
        Constraint::Length(9),
        Constraint::Min(10),
        Constraint::Min(12),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(6),
    ];
    Table::new(job.ranks.iter().skip(first).map(row), widths).header(Row::new(header).style(HEADER))
}

fn table_of_events(state: &State, lines: u16) -> Table<'_> {
    let most = usize::from(lines.saturating_sub(1));
    let rows = state.events.iter().rev().take(most).map(|event| {
        let ago = (state.now - event.at).max(0.0);
        let ago = if ago < 100.0 { format!("{ago:.0} s ago") } else { format!("{:.0} min ago", ago / 60.0) };
        let style = match event.severity {
            Severity::Warning => Style::new().fg(Color::Yellow),
            Severity::Note => Style::new(),
        };
        Row::new([ago, event.text.clone()]).style(style)
    });
    Table::new(rows, [Constraint::Length(12), Constraint::Min(20)])
        .block(Block::new().borders(Borders::TOP).title(" events "))
}

fn bits(rate: Option<f64>) -> String {
    let Some(rate) = rate else { return "-".into() };
    match rate {
        rate if rate >= 1e9 => format!("{:.2} Gbit/s", rate * 1e-9),
        rate if rate >= 1e6 => format!("{:.1} Mbit/s", rate * 1e-6),
        rate => format!("{:.1} kbit/s", rate * 1e-3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_controller::page::view::{Event, JobSeries, Late, Plan, Pool, Share, Word};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn state() -> State {
        let late = |median| {
            Some(Late { low: 0.0, median, high: median, last: if median > 0.0 { 0.9 } else { 0.0 }, of: 200 })
        };
        let rank = |rank: u16, median| Rank {
            rank,
            ranks: vec![rank.into()],
            name: format!("gpu-{rank}"),
            late: late(median),
            ..Rank::default()
        };
        let word = Word {
            name: "late",
            severity: Severity::Warning,
            text: "rank 3 on gpu-3 is 41 ms later than the others".into(),
            cure: Some("look at its machine".into()),
            ..Word::default()
        };
        let job = Job {
            name: "gpt".into(),
            world_size: 4,
            state: JobState::Running,
            steps: Some(2.5),
            in_sums: Some(0.31),
            shares: vec![Share {
                service: "10.0.0.9:4800".into(),
                share: 1.0,
                host: None,
                measured: Some(1.0),
            }],
            plan: Some(Plan { predicted: Some(8e-9), measured: Some(8.5e-9), ..Plan::default() }),
            ranks: (0..4).map(|index| rank(index, if index == 3 { 0.041 } else { 0.0 })).collect(),
            words: vec![word],
            ..Job::default()
        };
        let service = Service {
            address: "10.0.0.9:4800".into(),
            rate: Some(1_000_000_000),
            received: Some(5e8),
            sent: Some(2.5e8),
            pool: Some(Pool { units: 100, free: 40 }),
            ..Service::default()
        };
        let event = Event { at: 90.0, text: "gpt runs with 4 ranks".into(), ..Event::default() };
        let mut state = State {
            now: 100.0,
            services: vec![service],
            jobs: vec![job],
            events: vec![event],
            ..State::default()
        };
        let series = JobSeries { summed: vec![Some(1e6); 30], ..JobSeries::default() };
        state.history.jobs.insert("gpt".into(), series);
        state
    }

    fn drawn(state: &State, (width, height): (u16, u16), chosen: &mut Chosen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state, chosen)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn who_looks_sees_who_is_late_and_what_the_link_carries() {
        let text = drawn(&state(), (140, 40), &mut Chosen::default());
        for told in [
            "! rank 3 on gpu-3 is 41 ms later than the others: look at its machine",
            "500.0 Mbit/s  50 %",
            "250.0 Mbit/s  25 %",
            "40 of 100",
            "runs with 4 ranks, 2.50 steps/s, 31 % in sums",
            "predicted 8.000 ms/MB; measured 8.500 ms/MB",
            "gpt runs with 4 ranks",
            "10 s ago",
            "41.0",
        ] {
            assert!(text.contains(told), "{told:?} is not in\n{text}");
        }
    }

    #[test]
    fn every_size_of_screen_and_every_choice_is_drawn() {
        let mut chosen = Chosen::default();
        for size in [(1, 1), (20, 5), (80, 24), (300, 100)] {
            chosen.next_job(-1);
            chosen.scroll(1000);
            drawn(&state(), size, &mut chosen);
            drawn(&State::default(), size, &mut chosen);
        }
    }
}
