//! The stream by which the switch knows that the rank lives, and the rank hears at once what
//! becomes of its job.

use std::sync::Arc;
use std::time::Instant;

use fanin_udp::Membership;
use fanin_wire::{AbortReason, Rank};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};

use super::shared::Shared;
use crate::control_channel::{Connection, RETRY, explain, was_refused};
use crate::error::Member;
use crate::error::SessionError;
use crate::proto::heartbeat_reply::State;
use crate::proto::{AttendRequest, HeartbeatReply};

/// What the switch said of a job.
pub(super) type News = (Membership, HeartbeatReply);

/// Keeps the stream open as long as the session's runtime lives, in a new job too, and hands on
/// what the switch says.
///
/// `first` is told once the switch has answered, or why it will not: nobody listens there any more.
/// Ends with the job, when nobody listens to the news any more, and with a switch that knows of no
/// such stream: heartbeats alone tell it that the rank lives.
pub(super) async fn attend(
    shared: Arc<Shared>,
    service: usize,
    news: mpsc::Sender<News>,
    first: oneshot::Sender<Result<(), String>>,
) {
    let mut first = Some(first);
    // Whoever connects may have stopped waiting for it.
    let mut answered = |answer| first.take().map(|first| first.send(answer));
    loop {
        let began = Instant::now();
        let job = shared.job(service);
        // Another service may have taken over.
        let connection = shared.lane(service).connection.clone();
        let broke = match open(connection, &job, shared.rank).await {
            Ok(mut replies) => loop {
                let reply = match replies.message().await {
                    Ok(Some(reply)) => reply,
                    Ok(None) => break false,
                    Err(_) => break true,
                };
                answered(Ok(()));
                let ends = matches!(reply.state, Some(State::Aborted(_)));
                if news.send((job.clone(), reply)).await.is_err() || ends {
                    return;
                }
            },
            Err(status) if status.code() == Code::Unimplemented => return,
            Err(status) => {
                tracing::debug!(%status, "no stream to the switch");
                if was_refused(&status) {
                    answered(Err(explain(&status)));
                }
                false
            }
        };
        // The switch gives a rank whose connection breaks little time to come back.
        if !broke || began.elapsed() < RETRY {
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Keeps the stream of a rank open that one service has admitted and others have not yet. Returns
/// when that one says that a rank of the job is lost.
pub(super) async fn attend_meanwhile(
    connection: Connection,
    job: Membership,
    member: Member,
) -> SessionError {
    loop {
        if let Ok(mut replies) = open(connection.clone(), &job, member.rank).await {
            while let Ok(Some(reply)) = replies.message().await {
                // A service that stops may be that of a rank which knows more: the others will say.
                if let Some(State::Aborted(reason)) = reply.state
                    && let Ok(reason @ AbortReason::Expelled(_)) = reason.try_into()
                {
                    return SessionError::from_abort(reason, &member);
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn open(
    mut connection: Connection,
    job: &Membership,
    rank: Rank,
) -> Result<Streaming<HeartbeatReply>, Status> {
    let who = AttendRequest {
        job_id: job.id().0,
        rank: rank.0.into(),
        generation: job.generation().0.into(),
        passed_on: 0,
        secret: job.key().secret_of(rank),
        gone: false,
    };
    // Our half says no more, and stays open.
    let ours = tokio_stream::once(who).chain(tokio_stream::pending());
    Ok(connection.client.attend(ours).await?.into_inner())
}
