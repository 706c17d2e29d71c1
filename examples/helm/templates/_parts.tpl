{{- define "image" -}}
{{ with .root.Values.images.registry }}{{ . }}/{{ end }}{{ .name }}:{{ .root.Values.images.tag }}
{{- end }}

{{- define "user" -}}
{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "rights" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}
