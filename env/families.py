"""The five families: their fields, possible values, vague requests, and the words that ask for a field.

A field that is *critical* counts twice in the score; a plan must hold the *required* ones. Values are those of the
published scenarios. Prompts never show them: small models copy example values word for word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Value = str | int


@dataclass(frozen=True)
class Field:
    """One thing that the user may want: its possible values and the phrases (whole words) that ask for it.

    The field's own name need not be among `asked_by`; it always asks for the field.
    """

    values: tuple[Value, ...]
    asked_by: tuple[str, ...]
    critical: bool = False


@dataclass(frozen=True)
class Request:
    """A vague opening request. `says` limits what a profile may hold, so that a request never contradicts it.

    Where one value is left, the request has told the agent that value: "Plan a birthday party." says
    `event_type: birthday`. Several values ("Get a call on the calendar." is not a meeting in person) tell nothing.
    """

    text: str
    says: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    @property
    def told(self) -> dict[str, Value]:
        """The field values that the request gives away."""
        return {field: values[0] for field, values in self.says if len(values) == 1}


@dataclass(frozen=True)
class Family:
    """A kind of task. `fields` keeps the fixed order that breaks ties and orders profiles and prompts."""

    name: str
    fields: dict[str, Field]
    required: tuple[str, ...]
    requests: tuple[Request, ...]

    @cached_property
    def critical(self) -> tuple[str, ...]:
        """Names of the fields that count twice."""
        return tuple(name for name, field in self.fields.items() if field.critical)

    @cached_property
    def values(self) -> dict[str, tuple[Value, ...]]:
        """The value list of each field."""
        return {name: field.values for name, field in self.fields.items()}

    def told_by(self, request: str) -> dict[str, Value]:
        """Field values that the text of a request gives away; empty for a request that is not one of ours."""
        return next((r.told for r in self.requests if r.text == request), {})


EVENT_PLANNING = Family(
    name="event_planning",
    fields={
        "event_type": Field(
            ("birthday", "team-building", "anniversary", "baby-shower", "farewell"),
            ("kind of event", "type of event", "sort of event", "kind of celebration", "type of celebration",
             "kind of party", "type of party", "which event", "what event", "occasion", "celebrate", "celebrating"),
            critical=True,
        ),
        "guest_count": Field(
            (5, 10, 20, 50, 100),
            ("guests", "guest", "number of guests", "how many guests", "how many people", "number of people",
             "how many attendees", "attendees", "attendance", "headcount", "head count", "party size", "group size",
             "how many will attend", "how many are coming", "how big is the group", "invited"),
            critical=True,
        ),
        "date": Field(
            ("today", "tomorrow", "this week", "next week"),
            ("when", "day", "which day", "what day", "dates", "which week"),
            critical=True,
        ),
        "venue": Field(
            ("home", "office", "restaurant", "rented hall", "outdoor"),
            ("where", "location", "place", "venues", "hosted", "indoors", "outdoors"),
            critical=True,
        ),
        "budget_band": Field(
            ("<$100", "$100-500", "$500-2000", "$2000+"),
            ("budget", "cost", "spend", "spending", "price", "price range", "money", "how much"),
        ),
        "theme": Field(
            ("casual", "formal", "surprise", "themed"),
            ("style", "vibe", "mood", "themed", "formal", "casual", "dress code", "decorations"),
        ),
        "dietary_constraints": Field(
            ("none", "vegetarian", "vegan", "mixed"),
            ("dietary", "diet", "diets", "food", "eat", "meal", "meals", "menu", "catering", "allergy", "allergies",
             "vegetarian", "vegan"),
        ),
    },
    required=("event_type", "date", "guest_count", "venue"),
    requests=(
        Request("Set up a celebration."),
        Request("Plan a birthday party.", (("event_type", ("birthday",)),)),
        Request("Organize a team event.", (("event_type", ("team-building",)),)),
    ),
)  # fmt: skip

MEETING_SCHEDULING = Family(
    name="meeting_scheduling",
    fields={
        "participants": Field(
            ("just me and X", "whole team", "leadership", "external client"),
            ("who", "participant", "people", "attendees", "attendee", "attend", "attending", "join", "invite",
             "invited", "invitees", "guests"),
            critical=True,
        ),
        "date": Field(
            ("today", "tomorrow", "this week", "next week"),
            ("when", "day", "which day", "what day", "dates", "which week"),
            critical=True,
        ),
        "time": Field(
            ("morning", "afternoon", "evening", "flexible"),
            ("times", "hour", "what hour", "morning", "afternoon", "evening", "part of the day", "start"),
            critical=True,
        ),
        "duration_minutes": Field(
            (15, 30, 45, 60, 90),
            ("duration", "how long", "minutes", "how many minutes", "length", "how many hours"),
            critical=True,
        ),
        "platform": Field(
            ("zoom", "google-meet", "phone", "in-person"),
            ("zoom", "google meet", "phone", "in person", "online", "video", "video call", "virtual", "remote",
             "remotely", "conferencing", "where", "location", "place"),
        ),
    },
    required=("participants", "date", "time"),
    requests=(
        Request("Set up a meeting."),
        Request("Schedule a sync."),
        Request("Get a call on the calendar.", (("platform", ("zoom", "google-meet", "phone")),)),
    ),
)  # fmt: skip

MEDICAL_INTAKE = Family(
    name="medical_intake",
    fields={
        "primary_symptom": Field(
            ("headache", "fever", "cough", "fatigue", "rash", "nausea", "pain"),
            ("symptom", "symptoms", "main symptom", "complaint", "main complaint", "main problem", "main concern",
             "what is wrong", "what's wrong", "bothering", "bothers", "hurt", "hurts", "feel", "feeling",
             "experiencing", "problem"),
            critical=True,
        ),
        "duration": Field(
            ("<1 hour", "1-24 hours", "1-7 days", "1-4 weeks", "chronic"),
            ("how long", "since when", "when did", "how many days", "start", "started", "begin", "began", "onset",
             "lasted", "lasting"),
            critical=True,
        ),
        "severity": Field(
            ("mild", "moderate", "severe"),
            ("severe", "how severe", "how bad", "how serious", "how strong", "how painful", "serious", "intense",
             "intensity", "mild", "or severe", "moderate or severe"),
            critical=True,
        ),
        "age_band": Field(
            ("child", "teen", "adult", "senior"),
            ("age", "your age", "how old", "age group", "age range", "years old"),
            critical=True,
        ),
        "prior_conditions": Field(
            ("none", "diabetes", "hypertension", "asthma", "other"),
            ("condition", "conditions", "medical history", "history", "pre existing", "preexisting",
             "existing conditions", "diagnosed", "diabetes", "hypertension", "asthma"),
        ),
        "medications": Field(
            ("none", "otc", "prescription", "both"),
            ("medication", "medicine", "medicines", "meds", "drugs", "pills", "dosage", "dose", "prescription",
             "prescriptions", "over the counter"),
        ),
    },
    required=("primary_symptom", "duration", "severity"),
    requests=(
        Request("I'm not feeling well."),
        Request("I have a problem."),
        Request("I need some help."),
        Request("Something's off with my health."),
    ),
)  # fmt: skip

SUPPORT_TRIAGE = Family(
    name="support_triage",
    fields={
        "order_id": Field(
            ("#1199", "#4521", "#7830", "#9027", "none-provided"),
            ("id", "order number", "order reference", "order no", "reference number", "confirmation number",
             "which order", "number"),
            critical=True,
        ),
        "item_issue": Field(
            ("damaged", "wrong-item", "missing", "late", "never-arrived"),
            ("issue", "problem", "wrong", "what is wrong", "what's wrong", "went wrong", "what happened", "complaint",
             "damaged", "damage", "defective", "broken", "missing", "late"),
            critical=True,
        ),
        "refund_or_replace": Field(
            ("refund", "replace", "store-credit", "unsure"),
            ("refund", "refunded", "replace", "replacement", "replaced", "store credit", "exchange", "money back",
             "resolution", "resolve", "resolved", "outcome", "compensation"),
            critical=True,
        ),
        "urgency": Field(
            ("low", "medium", "high"),
            ("urgent", "how urgent", "priority", "deadline", "asap", "how soon", "how quickly", "how fast",
             "time sensitive"),
            critical=True,
        ),
        "channel_preferred": Field(
            ("email", "phone", "chat"),
            ("channel", "preferred channel", "contact", "contacted", "contact method", "reach", "reach you", "email",
             "e mail", "phone", "chat", "communication", "communicate", "get back to you"),
        ),
    },
    required=("order_id", "item_issue", "refund_or_replace"),
    requests=(
        Request("I need help with an order."),
        Request("There's an issue with my purchase."),
        Request("Something went wrong."),
        Request("My order is wrong.", (("item_issue", ("damaged", "wrong-item", "missing")),)),
    ),
)  # fmt: skip

CODING = Family(
    name="coding",
    fields={
        "stack": Field(
            ("python+fastapi", "node+express", "go+gin", "rust+axum", "ruby+rails"),
            ("language", "programming language", "framework", "tech", "tech stack", "technology", "technologies"),
            critical=True,
        ),
        "scale": Field(
            ("<100 users", "1k users", "10k users", "1M users"),
            ("how many users", "number of users", "expected users", "concurrent users", "user base", "traffic", "load",
             "throughput", "how many requests", "requests per second", "how big"),
            critical=True,
        ),
        "auth": Field(
            ("none", "api-key", "jwt", "oauth2", "saml-sso"),
            ("authentication", "authenticate", "authenticated", "authorization", "log in", "login", "sign in", "sso",
             "oauth", "oauth2", "jwt", "api key", "api keys", "security", "secured"),
            critical=True,
        ),
        "datastore": Field(
            ("postgres", "mysql", "mongodb", "sqlite", "redis-only"),
            ("database", "databases", "db", "data store", "storage", "store", "stored", "persistence", "persist",
             "sql", "postgres", "mysql", "mongodb", "sqlite", "redis"),
            critical=True,
        ),
        "deployment_target": Field(
            ("aws-lambda", "kubernetes", "heroku", "fly.io", "on-prem"),
            ("deployment", "deploy", "deployed", "hosting", "host", "hosted", "cloud", "kubernetes", "aws", "on prem",
             "infrastructure", "run on", "where"),
            critical=True,
        ),
        "language_version": Field(
            ("python3.11", "python3.12", "node18", "node20"),
            ("version", "versions", "which version", "what version", "version of the language", "runtime"),
        ),
        "test_coverage": Field(
            ("none", "unit-only", "unit+integration", "full-e2e"),
            ("test", "tests", "testing", "tested", "coverage", "unit tests", "integration tests", "e2e"),
        ),
    },
    required=("stack", "scale", "auth", "datastore"),
    requests=(
        Request("Build me an API."),
        Request("I need a backend."),
        Request("Make me a web service."),
        Request("Set up an endpoint."),
        Request("Write a service for me."),
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.name: family for family in (EVENT_PLANNING, MEETING_SCHEDULING, MEDICAL_INTAKE, SUPPORT_TRIAGE, CODING)
}

FAMILY_ALIASES = {"coding_requirements": "coding"}
"""Names under which published scenarios know a family."""
